"""DM05 in plain torch: vision, language, expert, and the flow-matching model of them.

Letters in shapes: B batch, L prefix tokens, T chunk steps, V cameras, H query heads, G key/value heads, D head dim,
C width, A action dim (padded), N patches, S image side in pixels.
"""
