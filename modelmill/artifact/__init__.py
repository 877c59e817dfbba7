"""The engine folder: manifest, weight files and their verification."""
