"""Who asks, and what was said: sessions, their secrets, their token trees and the rows made of them."""
