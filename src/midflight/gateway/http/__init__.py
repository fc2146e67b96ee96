"""Bytes in, bytes out: the routes of agents and of the operator, and answers whole or as events."""
