# Filled with install and export rules.
