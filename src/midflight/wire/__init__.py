"""HTTP as every process speaks it: messages at a server, routes behind a token, the server, the
client, and a transport in memory.
"""
