"""Tests of the generated packages that need data or tools of vlmgen."""
