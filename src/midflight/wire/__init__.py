"""HTTP as every process speaks it: what arrives and leaves at a server, routes behind a token, the
server, the client, and a transport in memory.
"""
