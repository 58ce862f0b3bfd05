"""The tiny trained pairs of the package: their files, their command line, their corpus and texts made of it."""
