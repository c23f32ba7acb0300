"""The distributed hash table: records with expirations, found from any node in a logarithmic number of calls."""
