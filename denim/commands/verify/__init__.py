"""`denim verify`: whether requests that begin from the prefix cache give what a recompute gives, here."""
