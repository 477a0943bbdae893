"""Using a trained model: generate, chat, evaluate, reference log-probabilities, export."""
