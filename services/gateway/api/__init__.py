"""What the OpenAI API says: requests in, answers and errors out."""
