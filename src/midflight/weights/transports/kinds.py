"""The names of the transports, as manifests and configurations have them."""

COLLECTIVE = "collective"
DIRECT = "direct"
"""The same broadcast, but a server's own workers take the bytes in. Its companion asks for them."""
PULL = "pull"
FILES = frozenset({"shared_memory", "file"})
"""The bytes of these are a file that engines read."""
BROADCAST = frozenset({COLLECTIVE, DIRECT})
SENT = BROADCAST | {PULL}
"""These travel over the network, from addresses that the manifest names."""
TRANSPORTS = FILES | SENT
