"""What tools/doctor.py looks at. Standard library only, so that it works in a bare clone; other packages are asked in
processes of their own."""
