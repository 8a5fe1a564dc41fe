from jaxcompact.cli import main

main()
