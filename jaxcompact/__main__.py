from jaxcompact.cli import main

if __name__ == "__main__":
    main()
