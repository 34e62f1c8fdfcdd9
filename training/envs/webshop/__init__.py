"""WebShop: a shop in text with search, pages and graded purchases (Yao et al. 2022), on real or generated products."""
