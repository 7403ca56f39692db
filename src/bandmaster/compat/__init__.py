"""Other libraries on bandmaster, without changing their code."""
