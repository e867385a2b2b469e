"""What an engine has done, kept step by step and shown: charts, a page, and a small file for who looks on."""
