"""The rollout process: gateway, agents, buffer, store and handover on one event loop."""
