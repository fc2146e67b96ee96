"""The names of the transports, as manifests and configurations have them."""

SHARED_MEMORY = "shared_memory"
FILE = "file"
"""A safetensors file that a foreign trainer has written and named. No configuration has it."""
DIRECT = "direct"
"""A broadcast that a server's own workers take in. Its companion asks for it."""
PULL = "pull"
FILES = frozenset({SHARED_MEMORY, FILE})
"""The bytes of these are a file that engines read."""
SENT = frozenset({DIRECT, PULL})
"""These travel over the network, from addresses that the manifest names."""
TRANSPORTS = FILES | SENT
