"""vLLM and SGLang behind the engine port: their command lines, their wires, and weights that they
load from a folder.
"""
