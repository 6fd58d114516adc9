"""Tool calls as the served families write them: streaming readers, and grammars that demand them."""
