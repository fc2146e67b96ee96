"""The version, written here only: the package, the command line and the OpenAPI document say this one."""

__version__ = "0.2.0"
