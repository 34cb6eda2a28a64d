"""The matrix of encoders: tiny models of every family, whose texts are computed alone and in company."""
