from bier.cli import main

main()
