"""All layers of a decoder in one call."""
