"""A page in the browser: generation with heads next to plain decoding, pictures of draft trees, and the doctor."""
