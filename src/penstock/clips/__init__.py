"""Clips of video and audio files as samples: an index of packets, and decoding of only the packets a clip needs."""
