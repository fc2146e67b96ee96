"""A recorded run, played again: the batch of a step, the step itself, one token of it."""
