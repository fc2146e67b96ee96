"""The pages of the viewer, a file each with one function that draws it."""
