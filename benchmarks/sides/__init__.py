"""The programs that benchmarks start beside themselves: servers, agents, and other trainers."""
