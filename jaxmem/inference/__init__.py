"""Using a trained model: generate, chat, evaluate, multiple choice, reference log-probabilities, export."""
