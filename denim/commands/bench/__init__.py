"""`denim bench serve`: a server under load, measured from its clients' side.

Knows the OpenAI API and nothing of Denim's engine: any server that speaks the API can be measured.
"""
