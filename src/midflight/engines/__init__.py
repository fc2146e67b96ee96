"""Engines behind one port: the embedded one, other people's servers, and the wire by which a
gateway reaches either.
"""
