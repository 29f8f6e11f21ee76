"""Video as rows: where the packets of a file lie, and the frames of a clip from no more of them than it takes."""
