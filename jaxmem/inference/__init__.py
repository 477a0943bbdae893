"""Using a trained model: generate, chat, evaluate, multiple choice, log-probabilities of a reference, export."""
