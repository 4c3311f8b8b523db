"""How wide packed values are: token ids and block numbers travel as u32, little-endian, from end to end."""

ID_BYTES = 4
BLOCK_BYTES = 4
