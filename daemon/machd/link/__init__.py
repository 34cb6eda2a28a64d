"""What the front and the engine process of a model both know: frozen data, and what follows from it."""
