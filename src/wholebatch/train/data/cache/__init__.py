"""What is kept between starts: tables as Arrow files, and what is known about their pictures."""
