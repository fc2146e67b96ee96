"""The parent of a run: starts the processes, listens to them, restarts what dies, stops all."""
