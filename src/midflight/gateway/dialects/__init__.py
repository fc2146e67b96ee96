"""The wire formats of agents. Each turns a body into a call, and an answer into JSON. Nothing here
waits.
"""
