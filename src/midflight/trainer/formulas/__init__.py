"""Pure functions of flat arrays of tokens: no configuration, no device, no logging."""
