"""`denim study`: measurements of the method itself, each with a table, a JSON file and a picture."""
