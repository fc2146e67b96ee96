"""Names that chat templates read and that no option may set."""

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {f"{kind}_token" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
    | {"additional_special_tokens"}
)
"""The gateway itself sets them."""
