"""What ``app`` hands from one part to another: lookups and acts that join tables of several parts."""
