"""The paper's equations as slow loops over Python floats, each written from the text: what the tests compare with."""
