"""What every benchmark is made of: options, rounds, tables, processes, runs and small models."""
