"""The HTTP layer: the routes of agents and of the operator."""
