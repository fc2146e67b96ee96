"""Bytes in, bytes out: routes, bodies, server-sent events, and the same application in memory."""
