"""An engine process: the embedded engine, or the companion of a server of other people."""
