"""A page in the browser: a target with heads beside plain decoding, draft trees as pictures, and the doctor."""
