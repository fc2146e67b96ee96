"""The engines of a gateway with their state: the choice of an engine for each request, holds, and
pauses.
"""
