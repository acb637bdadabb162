from serve_app.cli.main import main

if __name__ == "__main__":
    main()
