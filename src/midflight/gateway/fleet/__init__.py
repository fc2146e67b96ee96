"""The engines: which one takes a request, when requests are held back, and what a pause is."""
