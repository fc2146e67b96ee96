"""Wire formats of agents: each turns a body into a call and an answer into JSON. Nothing here
waits.
"""
